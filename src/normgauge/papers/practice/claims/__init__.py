"""What practice says, each sentence with its judge."""
