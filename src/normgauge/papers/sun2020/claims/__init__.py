"""What sun2020 says, each sentence with its judge."""
