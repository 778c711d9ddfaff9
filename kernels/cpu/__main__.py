"""`python -m folio.kernels.cpu`: compile the libraries that this machine lacks."""

from folio.kernels.cpu.build import compile_all

if __name__ == "__main__":
    compile_all()
