"""The fault catalogue: real defects as mutations of a correct engine, and the matrix fault x check."""
