"""What tests share: tiny models, recorded rounds, whole runs in processes of their own."""
