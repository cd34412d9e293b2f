import { Highlighter, PanelLeft, SlidersHorizontal } from "lucide-react";
import { IconButton } from "../ui/Button";
import { ContextMeter } from "./ContextMeter";
import styles from "./ConversationHeader.module.css";
import { ConversationMenu } from "./ConversationMenu";
import { changeSettings } from "./library";
import { ModelPicker } from "./ModelPicker";
import type { Conversation, Message } from "./types";

interface Props {
  conversation: Conversation;
  path: readonly Message[];
  listShown: boolean;
  settingsShown: boolean;
  onList: () => void;
  onSettings: () => void;
}

/** The conversation's title, its model, how full the context is, and what shows or hides. */
export function ConversationHeader({ conversation, path, listShown, settingsShown, onList, onSettings }: Props) {
  const { id, settings, title } = conversation;
  return (
    <header className={styles.header}>
      <IconButton label="Conversations" aria-expanded={listShown} onClick={onList}>
        <PanelLeft />
      </IconButton>
      <ModelPicker value={settings.model} onChange={(model) => changeSettings(id, { model })} />
      <h1 className={styles.title} title={title} dir="auto">
        {title}
      </h1>
      <ContextMeter conversation={conversation} path={path} />
      <IconButton
        label="Tokens by probability"
        aria-pressed={settings.showTokens}
        className={settings.showTokens ? (styles.pressed ?? "") : ""}
        onClick={() => changeSettings(id, { showTokens: !settings.showTokens })}
      >
        <Highlighter />
      </IconButton>
      <IconButton
        label="Settings of this conversation"
        aria-expanded={settingsShown}
        className={settingsShown ? (styles.pressed ?? "") : ""}
        onClick={onSettings}
      >
        <SlidersHorizontal />
      </IconButton>
      {path.length > 0 && <ConversationMenu conversation={conversation} small={false} />}
    </header>
  );
}
