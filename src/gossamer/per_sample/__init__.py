"""The literal scale of the paper: one gradient per sample, squared and summed during the ordinary backward pass."""
