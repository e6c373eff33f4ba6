"""Looking at checkpoints: verification and comparison (statistics and plots build on the same streams)."""
