"""Definition files and the building and running of images."""
