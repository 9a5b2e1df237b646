"""What users read is executed: pages, help, hints and the lines that install weft."""
