"""The experiments of akbar2025, one file each."""
