"""A finished job as one page of plots. matplotlib is needed for this alone: pip install 'longhaul[report]'"""
