"""Models of others: their files in and out, and the harness they are evaluated with."""
