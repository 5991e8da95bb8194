"""The ledger service: record which container holds which GPU or MIG device."""
