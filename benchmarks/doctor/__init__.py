"""Seeded faults with repaired twins, historical bugs and a clean zoo: how often the doctor is right."""
