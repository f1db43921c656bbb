"""The production layer: what training and serving code imports. Torch only, never pytest."""
