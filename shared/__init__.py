"""Code that runs on both sides of the bridge. Loads no torch."""
