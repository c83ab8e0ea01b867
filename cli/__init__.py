"""The console command `raydix`."""
