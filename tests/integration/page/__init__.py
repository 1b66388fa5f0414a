"""The web page in a headless Chromium, before real servers."""
