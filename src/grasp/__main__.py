"""python -m grasp"""

from grasp.cli import main

main()
