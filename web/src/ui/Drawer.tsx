import { X } from "lucide-react";
import { type ReactNode, useEffect, useRef } from "react";
import { IconButton } from "./Button";
import styles from "./Drawer.module.css";

interface Props {
  open: boolean;
  title: string;
  side: "left" | "right";
  /** Whether there is room for it beside the content; otherwise it lies over the content. */
  beside: boolean;
  onClose: () => void;
  children: ReactNode;
}

/** A column at the side. On a narrow screen it lies over the page like a window and closes on Escape. */
export function Drawer({ open, title, side, beside, onClose, children }: Props) {
  if (!open) return null;
  if (beside)
    return (
      <aside className={`${styles.column} ${styles[side]}`} aria-label={title}>
        {children}
      </aside>
    );
  return (
    <Sheet title={title} side={side} onClose={onClose}>
      {children}
    </Sheet>
  );
}

function Sheet({ title, side, onClose, children }: Omit<Props, "open" | "beside">) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const element = dialog.current;
    if (element && !element.open) element.showModal();
  }, []);
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: a click beside the column closes it; Escape does so for the keyboard.
    <dialog
      ref={dialog}
      className={`${styles.sheet} ${styles[side]}`}
      aria-label={title}
      onCancel={(event) => {
        if (event.target !== dialog.current) return;
        event.preventDefault();
        onClose();
      }}
      onClick={(event) => {
        if (event.target === dialog.current) onClose();
      }}
    >
      <div className={styles.inside}>
        <div className={styles.close}>
          <IconButton label="Close" onClick={onClose}>
            <X />
          </IconButton>
        </div>
        {children}
      </div>
    </dialog>
  );
}
