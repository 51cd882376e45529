"""Flight delays: raw files, transform and model of the demo."""
