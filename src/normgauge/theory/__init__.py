"""Closed forms on floats and tensors; the files are named by what they compute."""
