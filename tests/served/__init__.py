"""Tests against real served engines. Each needs the model and a few minutes; marker `server`."""
