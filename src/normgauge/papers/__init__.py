"""The papers: their claims, judged; their experiments, run; what holds instead where they are wrong."""
