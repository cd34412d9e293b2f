import { useEffect, useState } from "react";
import { useCommand } from "../lib/commands";
import { useMedia } from "../lib/media";
import { go } from "../lib/route";
import { savedStore } from "../lib/saved";
import { useStore } from "../lib/store";
import type { Passage } from "../lookup/passages";
import { useFolders } from "../lookup/useFolders";
import { Button } from "../ui/Button";
import { Drawer } from "../ui/Drawer";
import { Empty, Notice } from "../ui/Notice";
import { countUsed, runs, sendMessage } from "./answering";
import styles from "./ChatView.module.css";
import { Composer } from "./Composer";
import { ConversationHeader } from "./ConversationHeader";
import { ConversationList } from "./ConversationList";
import { conversations, openLibrary, storageProblem, treeOf } from "./library";
import { SettingsPanel } from "./SettingsPanel";
import { Thread } from "./Thread";
import { type Attached, type Conversation, NOTHING_ATTACHED } from "./types";
import { useDroppedFiles } from "./useDroppedFiles";
import { useSight } from "./useSight";
import { useConversation, useThread } from "./useThread";
import { Welcome } from "./Welcome";

const isBoolean = (value: unknown): value is boolean => typeof value === "boolean";
const listOpen = savedStore("chat.list", true, isBoolean);
const settingsOpen = savedStore("chat.settings", false, isBoolean);

/** The conversations, the one that is open, and its settings. */
export function ChatView({ conversationId }: { conversationId: string }) {
  const conversation = useConversation(conversationId);
  const ready = useStore(conversations) !== null;
  const panels = usePanels();
  useCommand("newChat", () => {
    go("chat");
    panels.closeSheets();
  });
  useCommand("search", () => {
    panels.showList(true);
    requestAnimationFrame(() => document.querySelector<HTMLElement>("[data-search]")?.focus());
  });
  useCommand("sidebar", () => panels.showList(!panels.list));
  useCommand("settings", () => panels.showSettings(!panels.settings));
  useEffect(() => {
    if (conversations.get() === null) void openLibrary();
  }, []);
  return (
    <div className={styles.chat}>
      <Drawer
        title="Conversations"
        side="left"
        beside={panels.wide}
        open={panels.list}
        onClose={() => panels.showList(false)}
      >
        <ConversationList current={conversation?.id ?? ""} onChoose={panels.closeSheets} />
      </Drawer>
      {conversation ? (
        <OpenConversation key={conversation.id} conversation={conversation} panels={panels} />
      ) : (
        ready && (
          <Empty title="This conversation is not here">
            <p>Conversations stay in the browser that had them. It was deleted, or another browser has it.</p>
            <Button kind="primary" onClick={() => go("chat")}>
              New chat
            </Button>
          </Empty>
        )
      )}
    </div>
  );
}

type Panels = ReturnType<typeof usePanels>;

/** Which side columns are open. On narrow screens they lie over the conversation and begin closed. */
function usePanels() {
  const wide = useMedia("(min-width: 900px)");
  const wider = useMedia("(min-width: 1200px)");
  const wantsList = useStore(listOpen);
  const wantsSettings = useStore(settingsOpen);
  const [sheet, setSheet] = useState<"list" | "settings" | null>(null);
  return {
    wide,
    wider,
    list: wide ? wantsList : sheet === "list",
    settings: wider ? wantsSettings : sheet === "settings",
    showList: (shown: boolean) => (wide ? listOpen.set(shown) : setSheet(shown ? "list" : null)),
    showSettings: (shown: boolean) => (wider ? settingsOpen.set(shown) : setSheet(shown ? "settings" : null)),
    closeSheets: () => setSheet(null),
  };
}

function OpenConversation({ conversation, panels }: { conversation: Conversation; panels: Panels }) {
  const thread = useThread(conversation.id);
  const problem = useStore(storageProblem);
  const { id } = conversation;
  const path = thread?.path ?? [];
  const sight = useSight(conversation, path);
  const folders = useFolders(id);
  const files = useDroppedFiles(sight, folders.attach);
  const send = (text: string, attached: Attached, passages?: readonly Passage[]) => {
    // As it is now: while the question was looked up, messages may have been deleted.
    sendMessage(id, treeOf(id).get()?.leaf ?? null, text, attached, passages);
    files.clear(attached);
    go("chat", id);
  };
  /** Send a message once what there is for it in the folders is found; answers whether it was sent. */
  const ask = (text: string, attached: Attached): true | Promise<boolean> => {
    if (!folders.isThere) {
      send(text, attached);
      return true;
    }
    return folders.find(text, conversation.settings.model, countUsed(path)).then((found) => {
      const leaf = treeOf(id).get()?.leaf;
      if (found === null || (leaf && runs.get().has(leaf))) return false; // an answer began meanwhile
      send(text, attached, found.passages);
      return true;
    });
  };
  return (
    <>
      <section className={styles.conversation} aria-label={conversation.title} {...files.handlers}>
        <ConversationHeader
          conversation={conversation}
          path={path}
          listShown={panels.list}
          settingsShown={panels.settings}
          onList={() => panels.showList(!panels.list)}
          onSettings={() => panels.showSettings(!panels.settings)}
        />
        {problem && (
          <div className={styles.problem}>
            <Notice kind="warning">{problem}</Notice>
          </div>
        )}
        {thread && path.length === 0 ? (
          <div className={styles.start}>
            <Welcome
              model={conversation.settings.model}
              isBusy={folders.attaching !== null || folders.isLooking}
              onAsk={(text) => void ask(text, NOTHING_ATTACHED)}
            />
          </div>
        ) : (
          thread && <Thread tree={thread.tree} path={path} conversation={conversation} />
        )}
        <Composer
          conversation={conversation}
          path={path}
          files={files}
          folders={folders}
          sees={sight.blind === null}
          onSend={ask}
        />
        {files.isOver && (
          <p className={styles.drop}>
            Drop {sight.blind === null ? "pictures, PDFs or text files" : "PDFs or text files"} to add them to the
            message, or a folder to look questions up in it
          </p>
        )}
      </section>
      <Drawer
        title="Settings of this conversation"
        side="right"
        beside={panels.wider}
        open={panels.settings}
        onClose={() => panels.showSettings(false)}
      >
        <SettingsPanel conversation={conversation} />
      </Drawer>
    </>
  );
}
