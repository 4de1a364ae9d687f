"""Speed and truth beside peers; `make bench` runs the book."""
