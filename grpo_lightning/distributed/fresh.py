# TEMPORARY STUB
def protect_processes():
    pass
