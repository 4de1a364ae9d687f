"""The experiments of batchnorm_article, one file each."""
