import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { ApiError } from "./api/client";
import { keepForOffline } from "./lib/offline";
import { App } from "./shell/App";
import "./styles/tokens.css";
import "./styles/base.css";

const queries = new QueryClient({
  defaultOptions: {
    queries: {
      refetchOnWindowFocus: true,
      staleTime: 2_000,
      // A refusal stays a refusal; a lost server comes back.
      retry: (count, error) => !(error instanceof ApiError && error.status > 0) && count < 3,
    },
  },
});

keepForOffline();

const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no element #root");
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={queries}>
      <App />
    </QueryClientProvider>
  </StrictMode>,
);
