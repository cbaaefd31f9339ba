module handler

go 1.19
