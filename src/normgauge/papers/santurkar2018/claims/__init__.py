"""What santurkar2018 says, each sentence with its judge."""
