"""Lightning's loggers, whose failures end no run, and which a continued run goes on with."""
