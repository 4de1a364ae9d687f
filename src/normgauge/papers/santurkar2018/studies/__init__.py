"""The experiments of santurkar2018, one file each."""
