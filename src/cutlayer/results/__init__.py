"""Results of finished runs: trials and their spread, comparisons with a paper, and figures.

Imports: errors, planning, recipes, runs.
"""
