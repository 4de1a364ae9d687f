"""Charts of stored rows: pandas frames in, Altair charts out; this room knows no torch."""
