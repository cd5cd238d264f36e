"""What a training and its audit begin with, read from what earlier stages left."""
