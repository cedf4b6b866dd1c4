"""The fault catalogue: real defects as mutations of a correct engine, and the matrix of which check finds which."""
