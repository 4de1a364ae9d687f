"""What the doctor measures once and all checks share: passes in both modes, a real step, rows, identities."""
