"""The experiments of than2025, one file each."""
