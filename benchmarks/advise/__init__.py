"""The zoo of problems, and the regret of following advice on it."""
