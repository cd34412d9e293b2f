import { useQueryClient } from "@tanstack/react-query";
import { Tooltip } from "radix-ui";
import { useCallback, useEffect } from "react";
import { useConnection, useWatchedConnection } from "../api/connection";
import { runs } from "../chat/answering";
import { ChatView } from "../chat/ChatView";
import { busy, lazily } from "../lib/lazily";
import { useRoute, type View } from "../lib/route";
import { followTheme } from "../lib/theme";
import { attaching } from "../lookup/folders";
import { Notice } from "../ui/Notice";
import styles from "./App.module.css";
import { Boundary } from "./Boundary";
import { KeyDialog } from "./KeyDialog";
import { NAMES, Navigation } from "./Navigation";
import { Shortcuts } from "./Shortcuts";
import { Toasts } from "./Toasts";

const LAZY = {
  compare: lazily(() => import("../compare/CompareView")),
  models: lazily(() => import("../models/ModelsView")),
  engine: lazily(() => import("../engine/EngineView")),
  settings: lazily(() => import("../settings/SettingsView")),
};

busy.isBusy = () => runs.get().size > 0 || attaching.get().size > 0;

/** The whole page: the navigation, the view that the address names, and what concerns every view. */
export function App() {
  const { view, detail } = useRoute();
  const queries = useQueryClient();
  const refresh = useCallback(() => void queries.invalidateQueries(), [queries]);
  useWatchedConnection(refresh);
  useEffect(followTheme, []);
  useEffect(() => {
    document.title = view === "chat" ? "mlxr" : `${NAMES[view]} · mlxr`;
  }, [view]);
  return (
    <Tooltip.Provider delayDuration={500}>
      <div className={styles.app}>
        <button type="button" className={styles.skip} onClick={focusMain}>
          Skip to the content
        </button>
        <Navigation current={view} />
        <div className={styles.content}>
          <LostServer />
          <main id="main" tabIndex={-1} className={styles.main}>
            <Boundary key={view}>{draw(view, detail)}</Boundary>
          </main>
        </div>
        <KeyDialog onSaved={refresh} />
        <Shortcuts />
        <Toasts />
      </div>
    </Tooltip.Provider>
  );
}

function draw(view: View, detail: string) {
  if (view === "chat") return <ChatView conversationId={detail} />;
  const Chosen = LAZY[view];
  return <Chosen detail={detail} />;
}

function LostServer() {
  return useConnection() === "lost" ? (
    <div className={styles.banner}>
      <Notice kind="warning">
        The server does not answer. What you see stays here; the page goes on by itself once “mlxr serve” runs again.
      </Notice>
    </div>
  ) : null;
}

function focusMain(): void {
  document.getElementById("main")?.focus();
}
