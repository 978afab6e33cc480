"""GRASP: what would a model gain or lose if part of its corpus were kept, dropped or re-weighted?"""

__version__ = "0.1.0"
