"""What can be wrong with questions before anything is trained: twins, contamination, leaks, odd lengths and characters."""
