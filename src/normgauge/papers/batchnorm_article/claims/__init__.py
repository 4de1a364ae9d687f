"""What batchnorm_article says, each sentence with its judge."""
