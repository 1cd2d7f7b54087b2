"""What a step will take: time lines of planned programs, published cost rules."""
