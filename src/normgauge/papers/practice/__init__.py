"""Sentences of today's practice, judged as those of the papers are."""
