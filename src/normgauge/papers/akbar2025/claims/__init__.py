"""What akbar2025 says, each sentence with its judge."""
