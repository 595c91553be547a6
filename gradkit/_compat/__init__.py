"""Every private name of torch that gradkit uses, one function each."""
