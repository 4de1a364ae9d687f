"""What than2025 says, each sentence with its judge."""
