import { X } from "lucide-react";
import { useStore } from "../lib/store";
import { dismiss, toasts } from "../lib/toasts";
import { Button, IconButton } from "../ui/Button";
import styles from "./Toasts.module.css";

/** What was just done, with a button that takes it back. */
export function Toasts() {
  const shown = useStore(toasts);
  return (
    <div className={styles.toasts} role="status">
      {shown.map(({ id, text, undo }) => (
        <div key={id} className={styles.toast}>
          <span>{text}</span>
          {undo && (
            <Button
              small
              onClick={() => {
                undo();
                dismiss(id);
              }}
            >
              Undo
            </Button>
          )}
          <IconButton small label="Dismiss" onClick={() => dismiss(id)}>
            <X />
          </IconButton>
        </div>
      ))}
    </div>
  );
}
