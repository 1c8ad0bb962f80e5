from slipstream.cli.main import run

run()
