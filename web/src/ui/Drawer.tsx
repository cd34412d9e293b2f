import { X } from "lucide-react";
import { type ReactNode, useEffect, useRef, useState } from "react";
import { IconButton } from "./Button";
import styles from "./Drawer.module.css";
import { closeOnEscape, PortalHost } from "./portal";

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
  const inside = useRef<HTMLDivElement>(null);
  const [host, setHost] = useState<HTMLElement | null>(null);
  useEffect(() => {
    const element = dialog.current;
    if (element && !element.open) element.showModal();
    inside.current?.focus();
    setHost(element);
  }, []);
  return (
    <dialog
      ref={dialog}
      className={`${styles.sheet} ${styles[side]}`}
      aria-label={title}
      onCancel={(event) => {
        if (event.target !== dialog.current) return;
        event.preventDefault();
        onClose();
      }}
      onKeyDown={closeOnEscape(onClose)}
      onClick={(event) => {
        if (event.target === dialog.current) onClose();
      }}
    >
      <PortalHost value={host}>
        <div className={styles.inside} tabIndex={-1} ref={inside}>
          <div className={styles.close}>
            <IconButton label="Close" onClick={onClose}>
              <X />
            </IconButton>
          </div>
          {children}
        </div>
      </PortalHost>
    </dialog>
  );
}
