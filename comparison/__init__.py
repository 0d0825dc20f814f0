""" What compare.py is made of: what is made equal, the runs, the statistics, the report. """
