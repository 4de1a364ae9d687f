"""How runs happen: trained, evaluated, measured on schedule, spread over workers, kept in a store."""
