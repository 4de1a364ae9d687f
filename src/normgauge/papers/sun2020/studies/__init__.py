"""The experiments of sun2020, one file each."""
