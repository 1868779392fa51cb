"""This code beside another checkout of it, in one run and in turns."""
